"""An HTTP client for engines at a URL, with limits on time and size."""

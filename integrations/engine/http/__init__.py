"""An HTTP client with bounds on time and size, for engines behind a URL."""

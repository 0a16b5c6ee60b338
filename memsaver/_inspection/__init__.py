"""Statistics, timelines, explanations and fingerprints of the memory of tags and devices."""

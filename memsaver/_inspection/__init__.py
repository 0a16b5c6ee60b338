"""What tags and devices contain: statistics, timelines, explanations, fingerprints."""

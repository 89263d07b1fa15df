"""The main job on throw-away compute: two losses, two recoveries, and the same result, bit for bit."""

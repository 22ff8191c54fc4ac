"""Cases to time, the harness that times them, and pages of what was timed; no framework needed."""

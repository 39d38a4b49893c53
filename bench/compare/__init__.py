"""What bench/run is made of: the two sides that it measures, their prompts, and the machine under both."""

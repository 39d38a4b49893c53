"""What bench/capacity computes with: shapes of models, hosts, bytes and times, and the check against a running service."""

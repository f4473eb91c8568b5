"""The rules of `check_module`, by topic."""

"""What a rank's process asks them for."""

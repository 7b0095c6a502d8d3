"""What the scripts of this example share."""

"""What rounds cost on this machine, found out before real ones are served."""

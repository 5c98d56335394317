"""Running across hosts. Not available yet: only the command is here, to say so."""

"""An engine that others talk to while it runs."""

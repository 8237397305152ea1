"""Untrusted files, read within bounds."""

"""What a caller asks for and gets. No torch."""

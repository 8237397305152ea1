"""What proposes tokens for requests: drafter.py says what a drafter does; a file for each kind."""

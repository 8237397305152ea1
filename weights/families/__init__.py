"""The families of targets: a row of data each, which loader, errors and documents read."""

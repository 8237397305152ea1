"""The measuring code behind `specdec bench` and scripts/: it drives the engine from outside and is no part of it."""

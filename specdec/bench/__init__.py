"""The measurements of `specdec bench` and scripts/: they drive the engine from outside."""

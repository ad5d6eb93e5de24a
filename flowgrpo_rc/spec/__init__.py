"""Words become objects here, once: a configuration and a machine make a run spec."""

"""Studies built on the runtime and the simulator: one module each, results in run folders."""

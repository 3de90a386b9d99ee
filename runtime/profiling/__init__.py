"""What each stage costs on this machine, measured for the simulator."""

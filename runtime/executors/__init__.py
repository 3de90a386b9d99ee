"""Who carries a run out in this process: the loop of the constant lag, a given order of events
(recorded, or simulated), or threads; and the data and components that each works with."""

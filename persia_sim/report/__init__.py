"""What a simulated run says: intervals, critical path, sensitivity, staleness, report."""

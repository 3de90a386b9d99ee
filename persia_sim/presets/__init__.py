"""Named clusters, workloads and costs, each constant with its source."""

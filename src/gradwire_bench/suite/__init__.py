"""Many measurements as one: plans of cells, a runner that goes on where it stopped, a report, verdicts on papers."""

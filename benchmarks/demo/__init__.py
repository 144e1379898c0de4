"""The demonstration: people, reports, three helpers and one answer: `trefoil demo`."""

"""What things cost on this machine: `trefoil bench`."""

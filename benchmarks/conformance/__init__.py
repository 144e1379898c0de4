"""The standard's scenarios, run against `device/`."""

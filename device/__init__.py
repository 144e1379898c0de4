"""One person's device: matches conversions to impressions, and pays for the answer out of their privacy budget."""

"""What compression gains on a network and a device, before a day is spent on it."""

"""Results elsewhere: in trackers, as an archive, on the Hub."""

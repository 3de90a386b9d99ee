"""Which mode to take for a log on a cluster: what each gains there, and loses here."""

"""The fields of the configuration, in sections."""

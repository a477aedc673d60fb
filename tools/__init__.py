"""Build, check and record tools of the repository; nothing here is shipped in a variant."""

"""Videos: files and folders of frames, how they are read, cut, degraded and written."""

"""Records of jobs that outlive every process."""

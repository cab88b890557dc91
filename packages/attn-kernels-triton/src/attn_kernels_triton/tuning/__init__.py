"""Which of a few schedules is the fastest on a device: measured when asked for, kept on disk, taken from then on."""

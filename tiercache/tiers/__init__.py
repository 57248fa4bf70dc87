"""What holds bytes: memory that engines share, and disks. Each behind the contracts of `base`."""

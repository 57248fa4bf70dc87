"""What has earned a place on NVMe."""

SECOND = 2


class SecondSight:
    """One-off traffic writes nothing: a boundary earns its place when a second request reaches it."""

    def earned(self, sights: int) -> bool:
        """See `Admission`."""
        return sights >= SECOND


class Eager:
    """Everything is written, at the cost of flash wear."""

    def earned(self, sights: int) -> bool:
        """See `Admission`."""
        return sights >= 0

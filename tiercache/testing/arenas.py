"""What every arena must do. Subclass, say how to make one, and pytest runs it all."""

from tiercache.state import Extent
from tiercache.testing.objects import PAGE, content
from tiercache.tiers.base import Arena


class ArenaContract:
    """What an `Arena` promises."""

    SIZES = (4 * PAGE, 4 * PAGE, PAGE)

    def open(self) -> Arena:
        """Return an arena with segments of `SIZES`."""
        raise NotImplementedError

    def test_says_its_segments(self) -> None:
        """In order, in bytes."""
        arena = self.open()
        assert tuple(arena.segments) == self.SIZES
        arena.close()

    def test_views_are_the_memory(self) -> None:
        """Writable, flat, of the right length; two views of one place are one memory."""
        arena = self.open()
        for segment, size in enumerate(self.SIZES):
            view = arena.view(Extent(segment, 0, size))
            assert (view.nbytes, view.format, view.readonly) == (size, "B", False)
            view[:] = content(segment, size)
        for segment, size in enumerate(self.SIZES):
            last = arena.view(Extent(segment, size - PAGE, PAGE))
            assert last == content(segment, size)[-PAGE:]
        arena.close()

    def test_views_end_where_their_extent_ends(self) -> None:
        """Neighbours keep what they hold."""
        arena = self.open()
        whole = arena.view(Extent(0, 0, 4 * PAGE))
        whole[:] = bytes(4 * PAGE)
        arena.view(Extent(0, PAGE, 2 * PAGE))[:] = b"\xff" * (2 * PAGE)
        assert whole[:PAGE] == whole[3 * PAGE :] == bytes(PAGE)
        arena.close()

    def test_close_with_views_in_use(self) -> None:
        """No error, twice, and the view stays good: its holder finishes what it does."""
        arena = self.open()
        view = arena.view(Extent(0, 0, PAGE))
        view[:4] = b"live"
        arena.close()
        arena.close()
        assert bytes(view[:4]) == b"live"

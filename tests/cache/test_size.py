import pytest

from gpupipe.cache.size import parse_size
from gpupipe.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [(5, 5), ("5", 5), ("200GB", 200 * 10**9), ("1.5 TB", 1_500 * 10**9), ("2KiB", 2048), ("3m", 3_000_000), ("7B", 7)],
)
def test_parse_size_of_what_people_write(text, expected):
    assert parse_size("cache_bytes", text) == expected


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "", "GB", "1 XB", "-3GB", "0", None, "1iB"])
def test_parse_size_of_anything_else_raises(value):
    with pytest.raises(ConfigError, match="cache_bytes=") as error:
        parse_size("cache_bytes", value)
    assert error.value.field == "cache_bytes"

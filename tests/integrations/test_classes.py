"""Every optimizer class of other packages gives the bits of its unsharded run, or is refused."""

import pytest
from classes import PACKAGES, documented, page_of, sweep

from pool import Pool


@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_is_equal_or_refused_as_the_page_says(pool: Pool, package: str) -> None:
    results, other = pool.run(2, sweep, package, timeout=500)
    assert len(results) == len(other) > 0
    assert {name: result for name, result in results.items() if result.answer == "wrong"} == {}
    assert page_of(package, results) == documented(package)

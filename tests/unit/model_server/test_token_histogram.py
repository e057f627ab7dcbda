"""The token histogram, compared with the Prometheus client library's."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from model_server.openai.metrics import TokenHistogram

BUCKETS = (0.001, 0.5, 1.0, 80.0)
LABELS = {"model_name": 'a "quoted" one', "engine": "0"}


@given(st.lists(st.sampled_from([*BUCKETS, 0.0, 0.25, 2.0, 1e9]) | st.floats(0, 100), max_size=20))
def test_histogram_output_equals_the_librarys(values: list[float]) -> None:
    """Inclusive bounds, cumulative counts, sum, labels and help equal the library's output."""
    pages = []
    for ours in (False, True):
        registry = CollectorRegistry()
        if ours:
            histogram = TokenHistogram("vllm:gap_seconds", "Gaps.", LABELS, BUCKETS)
            registry.register(histogram)
            observe = histogram.observe
        else:
            library = Histogram("vllm:gap_seconds", "Gaps.", LABELS, registry=registry, buckets=BUCKETS)
            observe = library.labels(*LABELS.values()).observe
        for value in values:
            observe(value)
        page = generate_latest(registry).decode()
        pages.append([line for line in page.splitlines() if "_created" not in line])
    assert pages[0] == pages[1]

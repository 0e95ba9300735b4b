"""Which conformance tests run on uvloop as well as on asyncio and threads.

uvloop replaces the event loop and nothing above it: sockets, TLS, write buffers, timers, cancelling and the closing of
generators are its own. `jetspark.aio.transport` and the calls that wait are all that meets the difference. A test whose
subject is decided above them (a stream's configuration, a key's revision, the order of a batch) makes the same calls
on the same loop interface: on uvloop it would repeat what it has shown on asyncio.

A test that is not named here runs on asyncio and in threads. A new one is named when a loop can break it.
"""

from __future__ import annotations

DRIVERS = ["asyncio", "uvloop", "blocking"]

# Every test of these files.
FILES = {
    "test_login": "dialling, TLS and the time-outs of both",
    "test_messaging": "core publish and subscribe, large payloads, callbacks",
    "test_reconnect": "lost connections, dialling again, the send buffer meanwhile",
    "test_deadlines": "timers, and a full write buffer",
    "test_unresponsive": "servers that are stopped, cut off or gone, with full write buffers",
    "test_js_stopped_server": "timers of every JetStream call",
    "test_interrupts": "tasks that are cancelled at any step of the loop",
}

# Single tests of others, with the part of the loop they need.
TESTS = {
    "test_fast": {
        "test_a_batch_does_not_age_while_its_messages_wait_for_room": "a full write buffer",
        "test_a_batch_gives_up_when_there_is_no_room_for_as_long_as_its_timeout": "a full write buffer, timers",
        "test_a_batch_that_ends_while_messages_wait_for_room_says_so": "a full write buffer",
        "test_messages_are_stored_in_order_and_receipts_only_grow": "flow control",
        "test_the_pace_follows_the_servers_down_and_up_again": "flow control",
        "test_a_batch_is_kept_alive_while_its_producer_thinks": "timers",
        "test_several_may_add_to_one_batch_at_a_time": "flow control between tasks",
        "test_a_server_that_dies_under_a_batch": "a lost connection",
        "test_a_connection_cut_in_the_middle_of_a_frame": "a lost connection",
        "test_a_publisher_stores_everything_once_through_restarts_of_the_server": "lost connections",
        "test_a_publisher_accepts_no_more_than_its_bounds": "flow control",
        "test_a_publisher_gives_up_after_its_patience": "timers",
        "test_a_connection_that_is_closed_leaves_the_rest_to_be_read": "closing",
    },
    "test_pull": {
        "test_a_filling_fetch_returns_what_there_is_when_its_time_is_over": "timers",
        "test_no_wait_ends_though_the_server_says_nothing": "timers",
        "test_a_closed_connection_ends_a_fetch_with_an_error": "closing",
        "test_messages_gives_everything_once_and_in_order": "flow control",
        "test_a_loop_left_without_a_with_gives_back_too": "generators, which the loop closes",
        "test_bytes_bound_what_is_received_ahead": "flow control",
        "test_a_killed_server_loses_nothing_and_repeats_little": "a lost connection",
        "test_a_fetch_goes_on_after_a_restart": "a lost connection",
    },
    "test_publish_async": {
        "test_ten_thousand_are_stored_once_each_and_in_order": "flow control",
        "test_a_full_window_waits_for_room": "flow control",
        "test_a_full_send_buffer_makes_it_wait_too": "a full write buffer",
        "test_a_message_nobody_acknowledges_is_given_up_in_time": "timers",
        "test_whoever_only_looks_sees_the_timeout_too": "timers",
        "test_a_callback_hears_of_a_timeout_though_nobody_waits": "timers",
        "test_draining_the_connection_resolves_what_is_outstanding": "closing",
        "test_a_crash_under_load_leaves_no_future_open_and_stores_nothing_twice": "a lost connection",
    },
    "test_ordered": {
        "test_cuts_and_restarts_are_not_seen": "lost connections",
        "test_closing_the_connection_ends_the_iteration": "closing",
        "test_silence_alone_shows_that_the_stream_is_another": "timers",
    },
    "test_leaving": {
        "test_a_closed_publisher_sends_nothing_when_the_server_comes_back": "a lost connection",
        "test_one_readers_mistake_does_not_end_the_connection_of_the_others": "errors in a protocol's callbacks",
        "test_a_mistake_while_reading_ends_the_session_and_not_the_connection": "errors in a protocol's callbacks",
        "test_a_mistake_in_a_publisher_is_told_to_whoever_waits": "errors in a protocol's callbacks",
    },
    "test_objects": {
        "test_a_large_object_is_sent_in_a_window_and_read_in_parts": "flow control both ways",
        "test_a_slow_source_is_waited_for": "work in the loop's threads",
    },
}


def drivers_of(file: str, test: str) -> list[str]:
    """The drivers that run a test, both named without their folders and parameters."""
    if file in FILES or test in TESTS.get(file, {}):
        return DRIVERS
    return [driver for driver in DRIVERS if driver != "uvloop"]

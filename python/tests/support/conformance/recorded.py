"""Imported before ranks are forked: what takes seconds is done once for all."""

from conformance.tagged import recorded_calls

recorded_calls()

"""Asked: what a command or a demonstration asks a device to measure, in the standard's call or the paper's request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.named_function import named_function
from device.privacy_loss import report_sensitivity
from device.side_query import SideQuery, SideQueryForm
from protocol.errors import TrefoilError
from protocol.seconds import DAY

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asks a device to measure: the standard's call, or with a function the paper's request."""

    options: ConversionOptions
    function: str | None = None
    form: SideQueryForm = SideQueryForm.GENERAL

    def __post_init__(self) -> None:
        if self.function is None and self.form is not SideQueryForm.GENERAL:
            raise TrefoilError("the last-touch flag is for last touch alone (Theorem 16)", "Give --function last.")
        if self.function is not None and (self.options.impression_sites or self.options.impression_callers):
            raise TrefoilError(
                "--impression-site and --impression-caller belong to the standard's call", "Leave --function out."
            )

    def on(self, device: Device[R], now: int) -> ConversionOptions | AttributionRequest:
        """As the device takes it. Weeks of a request are those that the lookback touches, from end to end."""
        options = self.options
        if self.function is None:
            return options
        limits = device.overview().limits
        days = min(options.lookback_days or limits.max_lookback_days, limits.max_lookback_days)
        return AttributionRequest(
            epochs=device.calendar().window(now - days * DAY, now),
            epsilon=options.epsilon,
            buckets=options.histogram_size,
            value=options.value,
            query_sensitivity=report_sensitivity(options.max_value, options.histogram_size, epochs=2),
            function=named_function(self.function, options.credit),
            match_values=options.match_values,
            side_query=SideQuery(options.kappa, self.form) if options.kappa else None,
            unit=options.unit,
            aggregation_service=options.aggregation_service,
        )


def flag_form(text: str) -> SideQueryForm:
    """The form of the side query that a person names."""
    for form in (SideQueryForm.GENERAL, SideQueryForm.LAST_TOUCH):
        if form.value.replace(" ", "-") == text:
            return form
    raise TrefoilError(f"the flag has no form {text!r}", "Known are general and last-touch.")

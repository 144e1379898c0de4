"""What a report, a device, noise, validity and a ledger cost on this machine.

- `report_cost`: bytes of a report, and the time to seal and to open it
- `areas`: how well two samples of times tell two states apart
- `device_promises`: saves that are kept, and a shop's reports beside hostile callers
- `device_timing`: the time of a call to a device, and what its caller can infer from it
- `browser_timing`: the same in a page of real Chromium, and at the pipe of its host
- `noise_cost`: time, bytes, rounds and accuracy of each noise mode
- `validity`: what dishonest devices cost the helpers
- `ledger_cost`: what a report ledger costs as it grows
- `commands`: `trefoil bench`
"""

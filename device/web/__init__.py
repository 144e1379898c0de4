"""The device behind web pages: the checks of a browser, the response headers, the standard's scenarios.

- `browser`: permissions policy and user activation, checked before a call reaches the device
- `dictionaries`: the options of a call as JavaScript passes them
- `http_headers`: the Save-Impression, Measure-Conversion and Clear-Site-Data response headers
- `conformance`: runs the standard's scenarios against the device (`trefoil conformance`)
"""

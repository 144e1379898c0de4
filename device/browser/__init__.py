"""The Attribution API on every https site, in a person's own Chromium: an extension, and the device behind it.

Facts come from the browser, decisions are made in the host, and pages only make claims.

- `host`: the device as a native messaging host, which the extension starts and asks
- `profiles`: one device for each profile of a browser: where it lies, and how it begins
"""

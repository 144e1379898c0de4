"""The Attribution API on every https site, in a person's own Chromium: an extension, and the device behind it.

Facts come from the browser, decisions are made in the host, and pages only make claims.

- `host`: the device as a native messaging host, which the extension starts and asks
- `profiles`: one device for each profile of a browser: where it lies, and how it begins
- `install`: puts the extension and the host where browsers find them, and takes them away
- `commands`: the commands of `trefoil browser`

The extension itself is in the folder `extension`: `attribution.js` and `port.js` run in pages, `content.js` beside them
in a world of its own, and `worker.js` between them and the host.
"""

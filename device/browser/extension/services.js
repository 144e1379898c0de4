globalThis.__trefoil = { services: [] };

// The explorer without a server: the page itself contains the attention weights, as JSON.

import { mount } from "./explorer.js";
import { decodeLayer } from "./maps.js";

const { views } = JSON.parse(document.getElementById("views").textContent);
mount(document.getElementById("main"), views.map(({ label, layers }) => ({ label, layers: layers.map(decodeLayer) })));

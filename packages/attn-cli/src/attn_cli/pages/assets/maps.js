// Computations on attention weights: decoding, rollout, differences and statistics. Independent of the DOM.

// Decode a layer from an AttentionMapsResponse message in protobuf's JSON form.
export function decodeLayer(message) {
  const [heads, rows, cols] = message.attention_weights.shape.map(Number);
  const coded = atob(message.attention_weights.data);
  const raw = new Uint8Array(coded.length);
  for (let place = 0; place < coded.length; place += 1) raw[place] = coded.charCodeAt(place);
  if (raw.length !== heads * rows * cols * 4) throw new Error(`received ${raw.length} bytes for ${heads} x ${rows} x ${cols} weights`);
  const view = new DataView(raw.buffer);
  const weights = new Float32Array(heads * rows * cols);
  for (let place = 0; place < weights.length; place += 1) weights[place] = view.getFloat32(place * 4, true);
  const gradients = (message.input_gradients || []).map(Number);
  return {
    layer: message.layer,
    mechanism: message.mechanism,
    heads: message.heads,
    rows,
    cols,
    weights,
    queryTokens: message.query_tokens,
    keyTokens: message.key_tokens,
    gradients,
    target: message.next_token || "",
    note: message.gradients_note || "",
    cross: Boolean(message.cross_attention),
    axes: message.cross_attention ? ["generated", "source"] : ["query", "key"],
  };
}

// The matrix { rows, cols, values } of one head.
export function headOf(layer, place) {
  const size = layer.rows * layer.cols;
  return { rows: layer.rows, cols: layer.cols, values: layer.weights.subarray(place * size, (place + 1) * size) };
}

export function meanOfHeads(layer) {
  const size = layer.rows * layer.cols;
  const values = new Float32Array(size);
  for (let head = 0; head < layer.heads.length; head += 1)
    for (let place = 0; place < size; place += 1) values[place] += layer.weights[head * size + place] / layer.heads.length;
  return { rows: layer.rows, cols: layer.cols, values };
}

// Attention through all layers: the product of (A + I) / 2, A the mean over heads, with rows that sum to 1 (Abnar and
// Zuidema 2020, arXiv 2005.00928). Null where queries are not the keys, as in cross-attention.
export function rollout(layers) {
  const size = layers.length ? layers[0].rows : 0;
  if (!size || layers.some((layer) => layer.cross || layer.rows !== size || layer.cols !== size)) return null;
  let flow = new Float64Array(size * size);
  for (let place = 0; place < size; place += 1) flow[place * size + place] = 1;
  for (const layer of layers) {
    const mixed = meanOfHeads(layer).values;
    const next = new Float64Array(size * size);
    for (let row = 0; row < size; row += 1) {
      let sum = 0;
      for (let col = 0; col < size; col += 1) sum += (mixed[row * size + col] + (row === col ? 1 : 0)) / 2;
      for (let middle = 0; middle < size; middle += 1) {
        const share = (mixed[row * size + middle] + (row === middle ? 1 : 0)) / 2 / sum;
        if (share === 0) continue;
        for (let col = 0; col < size; col += 1) next[row * size + col] += share * flow[middle * size + col];
      }
    }
    flow = next;
  }
  return { rows: size, cols: size, values: Float32Array.from(flow) };
}

export function difference(one, other) {
  if (one.rows !== other.rows || one.cols !== other.cols) return null;
  return { rows: one.rows, cols: one.cols, values: one.values.map((value, place) => value - other.values[place]) };
}

// Mean over queries of half the sum of absolute differences: 0 for equal rows, 1 for rows that share no key.
export function totalVariation(one, other) {
  const change = difference(one, other);
  if (!change) return NaN;
  return change.values.reduce((sum, value) => sum + Math.abs(value), 0) / 2 / change.rows;
}

// Mean entropy of the rows, in nats; null if weights are negative.
export function entropy(matrix) {
  let sum = 0;
  for (const value of matrix.values) {
    if (value < -1e-6) return null;
    if (value > 0) sum -= value * Math.log(value);
  }
  return sum / matrix.rows;
}

// Mean distance between query and key in tokens, weighted.
export function reach(matrix) {
  let sum = 0;
  let total = 0;
  matrix.values.forEach((value, place) => {
    sum += Math.abs(value) * Math.abs(Math.floor(place / matrix.cols) - (place % matrix.cols));
    total += Math.abs(value);
  });
  return total ? sum / total : 0;
}

// The fraction of the total attention weight on the first key.
export function firstKey(matrix) {
  let sum = 0;
  let total = 0;
  matrix.values.forEach((value, place) => {
    total += Math.abs(value);
    if (place % matrix.cols === 0) sum += Math.abs(value);
  });
  return total ? sum / total : 0;
}

export const SCALES = [
  ["row", "0 to the largest of a typical row"],
  ["one", "0 to 1"],
  ["head", "0 to the largest shown"],
  ["later", "0 to the largest without the first key"],
];

// The median over rows of the largest weight on a key other than the first: the longer a text, the smaller the weights of
// most rows, while the first rows have few keys and many models leave the first key what they have no use for.
function typicalRow(matrix) {
  const largest = [];
  for (let row = 0; row < matrix.rows; row += 1) {
    let most = 0;
    for (let col = 1; col < matrix.cols; col += 1) most = Math.max(most, Math.abs(matrix.values[row * matrix.cols + col]));
    largest.push(most);
  }
  return largest.sort((one, other) => one - other)[Math.floor(matrix.rows / 2)];
}

// The value at the end of the colour scale; matrices that share a scale are given together.
export function top(scale, matrices) {
  if (scale === "one") return 1;
  if (scale === "row") return Math.max(...matrices.map(typicalRow)) || 1;
  let most = 0;
  for (const matrix of matrices)
    for (let place = 0; place < matrix.values.length; place += 1)
      if (scale === "head" || place % matrix.cols > 0) most = Math.max(most, Math.abs(matrix.values[place]));
  return most || 1;
}

// A small classifier as torch computes it in float32: Math.fround rounds every product and every sum.

const round = Math.fround;

// Little-endian float32 numbers, written in base64.
function floats(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

// Each kind of layer: what panel.py wrote of it, and its numbers in their order, become a function of its input.
const LAYERS = {
  relu: () => (x) => x.map((value) => Math.max(value, 0)),

  clamp: ({ low, high }) => (x) => x.map((value) => Math.min(Math.max(value, low), high)),

  affine({ channels }, take) {
    const [before, factor, after] = [take(channels), take(channels), take(channels)];
    return (x) => x.map((value, i) => {
      const c = Math.floor((i * channels) / x.length);
      return round(round(value - before[c]) * factor[c]) + after[c];
    });
  },

  // InputTruncation: at ties the lowest index goes first, the large side before the small one.
  truncation: ({ channels, k }) => (x) => {
    const out = x.slice(), size = x.length / channels;
    for (let start = 0; start < x.length; start += size) {
      const values = x.subarray(start, start + size), places = Array.from(values.keys());
      if (values.some(Number.isNaN)) {
        out.fill(NaN, start, start + size);
        continue;
      }
      places.sort((a, b) => (values[a] < values[b]) - (values[a] > values[b]));
      const gone = new Set(places.slice(0, k));
      places.sort((a, b) => (values[a] > values[b]) - (values[a] < values[b]) || a - b);
      for (const place of [...gone, ...places.filter((p) => !gone.has(p)).slice(0, k)]) out[start + place] = 0;
    }
    return out;
  },

  linear({ inputs, outputs, k }, take) {
    const weight = take(inputs * outputs), bias = take(outputs), terms = new Float32Array(inputs);
    return (x) => bias.map((end, o) => {
      const start = o * inputs;
      let sum = 0;
      if (k === 0) {
        for (let i = 0; i < inputs; i++) sum = round(sum + round(x[i] * weight[start + i]));
        return sum + end;
      }
      for (let i = 0; i < inputs; i++) {
        // In a truncated sum 0 * Infinity is 0.
        const w = weight[start + i], nothing = (x[i] === 0 || w === 0) && !Number.isNaN(x[i] + w);
        terms[i] = nothing ? 0 : x[i] * w;
      }
      if (terms.some(Number.isNaN)) return NaN;
      terms.sort();
      for (let i = k; i < inputs - k; i++) sum = round(sum + terms[i]);
      return sum + end;
    });
  },

  convolution({ inputs, outputs, size, stride, padding }, take) {
    const [channels, height, width] = inputs, [filters, rows, columns] = outputs;
    const weight = take(filters * channels * size[0] * size[1]), bias = take(filters);
    return (x) => {
      const out = new Float32Array(filters * rows * columns);
      for (let f = 0, at = 0; f < filters; f++)
        for (let r = 0; r < rows; r++)
          for (let c = 0; c < columns; c++, at++) {
            let sum = 0, w = f * channels * size[0] * size[1];
            for (let channel = 0; channel < channels; channel++)
              for (let i = 0; i < size[0]; i++) {
                const row = r * stride[0] - padding[0] + i, start = (channel * height + row) * width;
                for (let j = 0; j < size[1]; j++, w++) {
                  const column = c * stride[1] - padding[1] + j;
                  if (row >= 0 && row < height && column >= 0 && column < width)
                    sum = round(sum + round(x[start + column] * weight[w]));
                }
              }
            out[at] = sum + bias[f];
          }
      return out;
    };
  },
};

// A function from an image, a Float32Array, to logits.
function network({ layers, numbers }) {
  const all = floats(numbers);
  let at = 0;
  const take = (count) => all.subarray(at, (at += count));
  const steps = layers.map((layer) => LAYERS[layer.kind](layer, take));
  return (x) => steps.reduce((values, step) => step(values), x);
}
